# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize, under the names of vLLM (prompt, messages) and llama.cpp (content)."""

from typing import Annotated, Any

from pydantic import Field

from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel, chat_text, encode
from sparse_bitnet.serve.messages import StrictModel
from sparse_bitnet.serve.schema import ChatBody, parse_body

_CHAT = (
    *("messages", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


class TokenizeBody(StrictModel):
    """A text, or a chat that becomes one."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    add_special: bool = True

    def check(self) -> None:
        given = [self.prompt, self.content, self.messages]
        if sum(one is not None for one in given) != 1:
            raise ApiError(400, "give one of prompt, content and messages", param="prompt")


class DetokenizeBody(StrictModel):
    """Tokens."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20, fail_fast=True)
    ]


def tokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """Tokens of a text, those of a whole context at most. Raises `ApiError`."""
    body = parse_body(TokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    if body.messages is not None:
        given = {name: getattr(body, name) for name in _CHAT} | {"model": model.name}
        text, adds = chat_text(parse_body(ChatBody, given), model), False
    else:
        text = body.prompt or body.content or ""
        adds = body.add_special_tokens and body.add_special
    tokens = encode(text, model, most, add_special_tokens=adds)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": most}


def detokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """The text of tokens, special ones written out. Raises `ApiError`."""
    body = parse_body(DetokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    model.check_tokens(body.tokens, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}
