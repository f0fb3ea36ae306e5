"""lm-eval over an engine: a model class of its own, with contexts computed once for all choices.

The scores are those of lm-eval's Hugging Face model on the same weights: the same tokens, the same
truncation, the same sums. Only the order of the work differs.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs

from sparse_bitnet.data.tokenizer import load_tokenizer
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence
from sparse_bitnet.generation.generate import generate
from sparse_bitnet.generation.generation import GenerateOptions
from sparse_bitnet.generation.open_model import OpenModel
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.sampling import SamplingOptions
from sparse_bitnet.generation.scoring import ScoreJob, score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_PAGE = 64
_WORTH_REUSING = 16
"""A shorter common beginning is computed again: batches matter more."""

_KEPT_CONTEXTS = 4

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The strings, and the tokens of context and continuation."""


class EngineLM(TemplateLM):
    """An engine as lm-eval asks of a model."""

    def __init__(self, model: OpenModel, *, batch_size: int = 8) -> None:
        """
        Args:
            model: stays the caller's, who closes its engine.
            batch_size: contexts, or texts, computed together.
        """
        super().__init__()
        self._engine = model.engine
        self._text = model.tokenizer
        self._ends = model.end_tokens
        self.batch_size = batch_size
        # lm-eval's own tokenisation, special tokens and chat templates go through transformers'.
        self.tokenizer: Any = load_tokenizer(model.folder)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        return self._engine.context_length

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens with what the tokenizer adds by itself, unless told otherwise or it is there."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(
                string, self.tokenizer.decode(self.prefix_token_id)
            )
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each request the natural log-probability of its continuation, and whether it is greedy."""
        from tqdm import tqdm

        groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            # When both are too long the context is cut from the left.
            whole = (context + continuation)[-(self.max_length + 1) :]
            split = len(whole) - len(continuation)
            assert split > 0, "the continuation alone is longer than the context length"
            group = groups.setdefault(tuple(whole[:split]), {})
            group.setdefault(tuple(continuation), []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        prefixes = PrefixCache(_KEPT_CONTEXTS)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring") as bar:
            for batch in self._batches(sorted(groups.items())):
                for key, answer in self._score_batch(batch, prefixes).items():
                    for number in groups[key[0]][key[1]]:
                        found[number] = answer
                        if (strings := requests[number][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", strings, answer)
                        bar.update()
        prefixes.clear()
        return [found[number] for number in range(len(requests))]

    def _batches(
        self, groups: list[tuple[tuple[int, ...], dict[tuple[int, ...], list[int]]]]
    ) -> Iterator[list[tuple[tuple[int, ...], list[tuple[int, ...]]]]]:
        """Contexts with their continuations, as many as batch size and cache allow."""
        capacity = self._engine.free_tokens
        batch: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []
        used = 0
        for context, continuations in groups:
            needed = len(context) + _PAGE
            needed += sum(len(continuation) + 2 * _PAGE for continuation in continuations)
            if batch and (len(batch) == self.batch_size or used + needed > capacity):
                yield batch
                batch, used = [], 0
            batch.append((context, list(continuations)))
            used += needed
        if batch:
            yield batch

    def _score_batch(
        self,
        batch: list[tuple[tuple[int, ...], list[tuple[int, ...]]]],
        prefixes: PrefixCache,
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]]:
        """Each context once up to its last token, then every continuation from there."""
        opened: list[EngineSequence] = []
        try:
            contexts: list[ScoreJob] = []
            for context, _ in batch:
                body = np.asarray(context[:-1], dtype=np.int32)
                sequence, length = self._start(body, prefixes)
                opened.append(sequence)
                contexts.append(ScoreJob(sequence, context[length:-1], ()))
            self._make_room(batch, prefixes)
            score(self._engine, contexts)
            jobs: dict[tuple[tuple[int, ...], tuple[int, ...]], ScoreJob] = {}
            for (context, continuations), start in zip(batch, contexts, strict=True):
                for continuation in continuations:
                    sequence = start.sequence.fork()
                    opened.append(sequence)
                    tokens = (context[-1], *continuation[:-1])
                    jobs[context, continuation] = ScoreJob(sequence, tokens, continuation)
            score(self._engine, list(jobs.values()))
            kept = contexts[-1].sequence
            opened.remove(kept)
            prefixes.keep(kept, np.asarray(batch[-1][0][:-1], dtype=np.int32))
        finally:
            for sequence in opened:
                sequence.close()
        return {key: (sum(job.log_probabilities), job.is_greedy) for key, job in jobs.items()}

    def _start(self, context: np.ndarray, prefixes: PrefixCache) -> tuple[EngineSequence, int]:
        """A sequence that holds what is known of a context, and how much that is."""
        source, length = prefixes.longest(context)
        if source is not None and length >= _WORTH_REUSING:
            try:
                return source.fork(length), length
            except CacheFull:
                prefixes.clear()
        return self._engine.new_sequence(), 0

    def _make_room(
        self, batch: list[tuple[tuple[int, ...], list[tuple[int, ...]]]], prefixes: PrefixCache
    ) -> None:
        needed = sum(
            len(context) + _PAGE + sum(len(continuation) + 2 * _PAGE for continuation in rest)
            for context, rest in batch
        )
        while self._engine.free_tokens < needed and prefixes.evict():
            pass

    def loglikelihood_rolling(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, in windows that do not overlap."""
        totals: list[float] = []
        for request in requests:
            (string,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(string),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            rows = [(None, *utils.make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(rows, disable_tqdm=True)
            totals.append(sum(value for value, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), totals[-1])
        return totals

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, greedy unless a task asks for sampling."""
        from tqdm import tqdm

        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
            for numbers in groups.values():
                options = self._generate_options(requests[numbers[0]].args[1])
                room = self.max_length - options.max_new_tokens
                prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
                result = generate(
                    self._engine,
                    prompts,
                    options,
                    tokenizer=self._text,
                    end_tokens=self._ends | {self.eot_token_id},
                    max_batch=self.batch_size,
                )
                for number, text in zip(numbers, result.texts, strict=True):
                    found[number] = text.text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text.text)
                    bar.update()
        return [found[number] for number in range(len(requests))]

    def _generate_options(self, wanted: dict[str, Any]) -> GenerateOptions:
        known: dict[str, Any] = dict(normalize_gen_kwargs(wanted, self.max_gen_toks))
        until = handle_stop_sequences(known.get("until"), eos=None)
        most = known["max_gen_toks"]
        assert most < self.max_length, f"{most} new tokens leave no room for a prompt"
        is_greedy = not known.get("do_sample")
        return GenerateOptions(
            max_new_tokens=most,
            stop=tuple(string for string in until if string),
            sampling=SamplingOptions(
                temperature=0 if is_greedy else known["temperature"],
                top_k=known.get("top_k") or 0,
                top_p=known.get("top_p", 1.0),
                min_p=known.get("min_p") or 0.0,
                repetition_penalty=known.get("repetition_penalty", 1.0),
            ),
        )
