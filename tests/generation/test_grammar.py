# SPDX-License-Identifier: Apache-2.0
"""Output that ends by itself satisfies its grammar, whichever tokens the model prefers."""

import itertools
import json
import random
import time

import jsonschema
import numpy as np
import pytest

from serving_thread import END, byte_tokenizer, sentence_piece_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import Grammar, GrammarFailed, TokenGrammars
from sparse_bitnet.generation.request import Generation, GenerationRequest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.text import TextTokenizer

SCHEMAS = 25
"""Random ones; of 1,000, seeds 0 to 999, every text that ended was as its schema says."""
VOCAB = 300
"""More than the tokenizer has, as models have."""
BYTES = byte_tokenizer()
CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)} | {"1500": {}}
TERMS = [f"/.*a{i}.*/" for i in range(30)]
STRICT = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def grammars():
    return TokenGrammars(BYTES, VOCAB, frozenset({END}))


def written(grammars, grammar, seed, *, tokenizer=BYTES, ends=frozenset({END}), most=600):
    """A generation of random logits that like to end values and to be done."""
    noise = np.random.default_rng(seed)
    request = GenerationRequest(
        prompt=[1],
        max_tokens=most,
        sampling=SamplingOptions(seed=seed),
        tokenizer=tokenizer,
        stop_tokens=ends,
        grammar=grammars.start(grammar),
        is_start=True,
    )
    generation = Generation(request)
    while generation.finish_reason is None:
        logits = noise.normal(scale=2, size=VOCAB).astype(np.float32)
        for wanted in '"]},0123456789':
            logits[BYTES.encode(wanted)] += 3
        logits[sorted(ends)] += 3
        generation.finish_reason = generation.take_logits(logits).finish
    return generation


def random_schema(rng, depth=3):
    """Schemas with the keywords that people use."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    match rng.choice(kinds + (["object", "array", "anyOf", "ref"] * 4 if depth else [])):
        case "enum":
            return {"enum": rng.sample(["a", "é\n", 1, -2.5, None, True, "b c"], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["fixed", 7, {"a": [1]}, None])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^x|y$", "[0-9]+z"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4"])}
        case "string":
            least = rng.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 900)}
        case "number":
            return {"type": "number", "minimum": -3, "exclusiveMaximum": rng.choice([0, 2.5, 1e3])}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
        case "object":
            names = rng.sample(["a", "b", "name", "größe", "x y", 'q"'], rng.randint(0, 4))
            more = rng.choice([False, False, {"type": "integer"}])
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": more,
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            inner = random_schema(rng, depth - 1)
            if "$ref" in json.dumps(inner):
                return inner
            whole = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
            return whole | {"$defs": {"one": inner}} if depth == 3 else inner
        case simple:
            return {"type": simple}


def check(grammars, seed):
    """Return whether the text has ended; if so, check that it fits its schema."""
    schema = random_schema(random.Random(seed))
    generation = written(grammars, Grammar.json_schema(schema), seed)
    if generation.finish_reason != "stop":
        return False
    jsonschema.validate(
        json.loads(generation.text), schema, format_checker=jsonschema.FormatChecker()
    )
    return True


def test_finished_output_fits_its_schema(grammars):
    assert sum(check(grammars, seed) for seed in range(SCHEMAS)) > 0.8 * SCHEMAS


def test_output_fits_its_regex_choice_or_rules(grammars):
    assert written(grammars, Grammar.regex("[ab]{3}c?"), 0).text[:3].strip("ab") == ""
    options = ["yes", "no", 'q"\n世', "/", *map(str, range(3000))]
    texts = {written(grammars, Grammar.choice(options), seed).text for seed in range(20)}
    assert len(texts) > 1
    assert texts <= set(options)
    for rules in ('root ::= "hi " name\nname ::= [a-c]+ "!"', 'start: "hi " /[a-c]+/ "!"'):
        text = written(grammars, Grammar.rules(rules), 1).text
        assert text.startswith("hi ")
        assert text.endswith("!")
        assert text[3:-1].strip("abc") == ""
    assert json.loads(written(grammars, Grammar.json_object(), 6).text) is not None


def test_a_text_ends_where_nothing_can_follow_also_without_end_tokens():
    grammars = TokenGrammars(BYTES, VOCAB, frozenset())
    generation = written(grammars, Grammar.choice(["ab"]), 0, ends=frozenset())
    assert (generation.text, generation.finish_reason, generation.generated) == ("ab", "stop", 2)


def test_special_tokens_are_not_grammar_text(grammars):
    matcher = grammars.start(Grammar.regex("(.|\n)+"))
    allowed = np.isfinite(matcher.masked(np.zeros(VOCAB, np.float32)))
    assert allowed[BYTES.encode("a b\n<é")[:-1]].all()
    assert not allowed[END:].any()
    matcher.take(65)
    assert np.flatnonzero(np.isfinite(matcher.masked(np.zeros(VOCAB, np.float32)))[END:]) == [0]


def test_grammars_fit_vocabularies_with_spaces_before_words():
    spaced = TextTokenizer(sentence_piece_tokenizer("{", ["▁ {"], adds_space=True))
    grammars = TokenGrammars(spaced, VOCAB, frozenset({2}))
    properties = {"number": {"type": "integer"}}
    schema = STRICT | {"properties": properties, "required": ["number"]}
    for seed in range(3):
        text = written(
            grammars, Grammar.json_schema(schema), seed, tokenizer=spaced, ends=frozenset({2})
        ).text
        jsonschema.validate(json.loads(text), schema)
    assert (
        written(grammars, Grammar.choice([" a"]), 0, tokenizer=spaced, ends=frozenset({2})).text
        == " a"
    )


def test_slow_grammars_fail_only_their_own_output(grammars, monkeypatch):
    tick, token = 0.02, BYTES.encode("a")[0]
    clock = itertools.accumulate(iter(lambda: tick, None))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    matcher = grammars.start(Grammar.regex("[a-z]*"))
    other = matcher.copy()
    taken = map(matcher.take, itertools.repeat(token))
    with pytest.raises(GrammarFailed, match="take too long to follow"):
        list(taken)
    tick = 0.004
    for _ in range(400):
        other.take(token)


def test_copies_of_a_matcher_advance_separately(grammars):
    grammars.start(Grammar.choice(["ab"])).take(BYTES.encode("a")[0])
    matcher = grammars.start(Grammar.choice(["ab"]))
    copy = matcher.copy()
    assert not matcher.take(BYTES.encode("a")[0])
    assert matcher.take(BYTES.encode("b")[0])
    assert np.isfinite(copy.masked(np.zeros(VOCAB, np.float32))).sum() == 1


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (lambda: Grammar.regex("(a"), "unclosed group"),
        (lambda: Grammar.regex("a\udce9"), "not Unicode"),
        (lambda: Grammar.rules("start: missing"), "missing"),
        (lambda: Grammar.rules("root = 3"), "neither Lark nor GBNF"),
        (lambda: Grammar.json_schema({"type": "what"}), "Invalid type"),
        (lambda: Grammar.json_schema({"not": {}}), "not"),
        (lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}), "not present"),
        (lambda: Grammar.json_schema([]), "object"),
        (lambda: Grammar.json_text("{"), "not a JSON schema"),
        (lambda: Grammar.json_schema({"$defs": CHAIN, "$ref": "#/$defs/0"}), "nested too deeply"),
        (lambda: Grammar.rules("start: A\nA: " + "&".join(TERMS)), "too long"),
        (lambda: Grammar.rules("\n" * 100_000 + 'root ::= "x"'), "too long"),
    ],
)
def test_invalid_grammars_are_refused(grammars, grammar, message):
    with pytest.raises(UserError, match=message) as error:
        grammars.start(grammar())
    assert "\n" not in str(error.value)
    grammars.start(Grammar.choice([message]))


def test_refusals_are_remembered(grammars, monkeypatch):
    refused, asked = Grammar.rules("start: missing_rule"), []
    with pytest.raises(UserError) as first:
        grammars.start(refused)
    monkeypatch.setattr(grammars._sandbox, "ask", asked.append)
    with pytest.raises(UserError) as again:
        grammars.known(refused)
    assert (str(again.value), asked) == (str(first.value), [])
    assert grammars.known(Grammar.rules("start: another_rule")) is None


def test_lenient_schemas_ignore_unsupported_keywords(grammars):
    schema = {"type": "string", "maxLength": 3, "not": {"const": "x"}}
    text = written(grammars, Grammar.json_schema(schema, is_strict=False), 0)
    assert len(json.loads(text.text)) <= 3


def test_a_vocabulary_without_the_bytes_fails(grammars):
    short = TokenGrammars(BYTES, 40, frozenset())
    with pytest.raises(UserError, match="vocabulary lacks"):
        short.start(Grammar.choice(["\xff"]))
