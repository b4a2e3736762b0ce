"""A vision-language-action policy: supervised fine-tuning, and post-training on its own rollouts."""
