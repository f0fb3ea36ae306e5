# SPDX-License-Identifier: Apache-2.0
"""An lm-eval model class over an engine, which computes each context once for all choices.

The scores are those of lm-eval's Hugging Face model on the same weights: the same tokens, the same
truncation, the same sums. Only the order of the work differs.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from tqdm import tqdm

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.generation.open_model import OpenModel
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler

_OPTIONS = (
    *("until", "max_gen_toks", "do_sample", "temperature", "repetition_penalty"),
    *("top_p", "top_k", "min_p", "typical_p", "length_penalty", "early_stopping"),
)
"""Options of generation that the engine follows, or that change no greedy text."""
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "use_cache": True}
"""Values of other options that change no greedy text."""


class EngineLM(TemplateLM):
    """An engine as an lm-eval model; `batch_size` sequences are computed together."""

    def __init__(self, model: OpenModel, *, batch_size: int = 8) -> None:
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.max_length = model.engine.context_length
        # lm-eval's own tokenisation and special tokens go through transformers'.
        self.tokenizer: Any = load_tokenizer(model.folder)
        # The model's own options, which transformers follows unless a task sets them.
        own = read_json_if_there(Path(model.folder) / "generation_config.json")
        names = ("repetition_penalty", "num_beams", "no_repeat_ngram_size")
        self.defaults = {name: own[name] for name in names if name in own}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return tokens. By default, special tokens are added unless the text begins with the first."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, prefix)
        with library_errors_as("the model's tokenizer.json cannot encode a task's text"):
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return for each request the natural log-probability of its continuation, and whether it is
        greedy. A request is texts, then the tokens of context and continuation."""
        # The rows of each text and the length of its context; equal ones are computed once.
        rows: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number, (texts, context, continuation) in enumerate(requests):
            if not continuation:
                asked = repr(texts[0][-60:]) if texts else ""
                raise UserError(f"an answer of the task adds no token to its question {asked}")
            # When both are too long the context is cut from the left.
            whole = tuple(context + continuation)[-(self.max_length + 1) :]
            split = len(whole) - len(continuation)
            if split < 1:
                raise UserError(
                    f"an answer alone has more tokens than the context length of {self.max_length}"
                )
            rows.setdefault((whole, split), []).append(number)
        choices = Counter(whole[:split] for whole, split in rows)
        most = self.batch_size * max(choices.values(), default=1)
        scheduler = Scheduler(self.model.engine, max_running=most)
        # Put prompts with a common prefix side by side.
        prompts = (
            GenerationRequest(prompt=whole, max_tokens=0, score_from=split, top_scores=1)
            for whole, split in sorted(rows)
        )
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring") as bar:
            for generation in scheduler.run(prompts):
                scores, request = generation.prompt_scores, generation.request
                total = sum(score.logprob or 0.0 for score in scores)
                is_greedy = all(score.top[0][0] == score.token for score in scores)
                numbers = rows[tuple(request.prompt), request.score_from or 0]
                answers |= dict.fromkeys(numbers, (total, is_greedy))
                bar.update(len(numbers))
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-probabilities of whole texts, in windows that do not overlap."""
        totals: list[float] = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            rows = [(None, *utils.make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(rows, disable_tqdm=True)
            totals.append(sum(value for value, _ in scores))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return texts up to a stop string, greedy."""
        wanted = [self._request(*request.args) for request in requests]
        scheduler = Scheduler(self.model.engine, max_running=self.batch_size)
        running, total = scheduler.run(wanted), len(requests)
        bar = tqdm(running, "Generating", total, disable=disable_tqdm)
        texts = {id(generation.request): generation.text for generation in bar}
        return [texts[id(request)] for request in wanted]

    def _request(self, context: str, options: dict[str, Any]) -> GenerationRequest:
        given = {name: value for name, value in options.items() if value is not None}
        known: dict[str, Any] = dict(normalize_gen_kwargs(self.defaults | given, 256))  # lm-eval's
        until = handle_stop_sequences(known.get("until"), eos=None)
        most = known["max_gen_toks"]
        if most >= self.max_length:
            raise UserError(
                f"the task asks for {most} new tokens, which leave no room for a prompt in the context "
                f"length of {self.max_length}"
            )
        if known.get("do_sample"):
            raise UserError(
                "the task samples, which needs --engine transformers: the CPU engine is greedy"
            )
        for name, value in known.items():
            if name not in _OPTIONS and value is not None and value != _NEUTRAL.get(name, ...):
                raise UserError(f"generation with {name}={value} needs --engine transformers")
        penalty = known.get("repetition_penalty") or 1.0
        if not isinstance(penalty, int | float):
            raise UserError(f"repetition_penalty={penalty!r} of a task or the model is no number")
        return GenerationRequest(
            prompt=self.tok_encode(context)[most - self.max_length :] or [self.prefix_token_id],
            max_tokens=most,
            tokenizer=self.model.tokenizer,
            stop=tuple(string for string in until if string),
            is_start=True,
            stop_tokens=self.model.end_tokens | {self.eot_token_id},
            sampling=SamplingOptions(temperature=0, repetition_penalty=penalty),
        )
