"""A small actor-critic beside a vision-language-action policy that stays as it is."""
