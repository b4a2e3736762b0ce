"""Meta-World's fifty tasks of one arm: `hilt.envs.make("metaworld/door-open")`. Documentation: docs/metaworld.md."""
