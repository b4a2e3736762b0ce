"""Soft actor-critic with RLPD's options (being written)."""

from __future__ import annotations

from hilt.algos.config import Rlpd

__all__ = ["Rlpd"]
