"""`sparse-bitnet generate`: continue a prompt with any checkpoint, through transformers."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(kw_only=True)
class GenerateConfig:
    """Continue a prompt with a checkpoint."""

    prompt: str = "def "
    """Text to continue."""

    max_new_tokens: int = 64
    """Most tokens to add."""

    temperature: float = 0.8
    """0 is greedy."""

    top_p: float = 0.95
    """Nucleus sampling threshold."""

    seed: int = 0
    """Of the sampling."""


def main(arguments: list[str]) -> None:
    """Print the continuation of a prompt."""
    import tyro

    def entry(
        checkpoint: Annotated[str, tyro.conf.Positional],
        config: Annotated[GenerateConfig, tyro.conf.arg(name="")],
    ) -> None:
        """Continue a prompt with a checkpoint.

        Args:
            checkpoint: run folder, checkpoint folder, or any transformers folder or hub id.
            config: sampling.
        """
        print(generate(checkpoint, config))

    tyro.cli(entry, args=arguments, prog="sparse-bitnet generate")


def generate(checkpoint: str, config: GenerateConfig) -> str:
    """The prompt and its continuation as text.

    Raises `UserError` when the model or its tokenizer cannot be loaded.
    """
    from sparse_bitnet.data.tokenizer import load_tokenizer
    from sparse_bitnet.evaluation.held_out import resolve_checkpoint
    from sparse_bitnet.evaluation.sampling import continue_text
    from sparse_bitnet.hub import from_pretrained

    path = resolve_checkpoint(checkpoint)
    return config.prompt + continue_text(
        from_pretrained(path),
        load_tokenizer(path),
        config.prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
