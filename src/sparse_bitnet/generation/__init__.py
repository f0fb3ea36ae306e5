"""From logits to text: sampling, generation, chat, and the scheduler of many requests."""
