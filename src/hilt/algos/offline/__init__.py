"""Formulas of learning from what was logged, whoever acted."""
