"""RECAP: a policy learns from all of its episodes which of its actions were good."""
