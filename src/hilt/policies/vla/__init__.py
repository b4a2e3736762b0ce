"""Vision-language-action policies: OpenVLA, OpenVLA-OFT, pi0, pi0.5, SmolVLA and
our own small one, which answer with chunks."""
