"""Commands that serve others over the network: an arm, and a policy."""
