"""One of each of what Hilt can be extended by; docs/extending.md describes them."""
