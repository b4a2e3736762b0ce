"""A cache with a limit in bytes: what was used last stays."""

from __future__ import annotations

from hilt.app.episodes.byte_cache import ByteCache


def test_byte_cache_drops_what_was_used_least_recently():
    cache: ByteCache[str] = ByteCache(10)
    for name in "abc":
        cache.put(("x", name), name, 3)
    assert cache.get(("x", "a")) == "a" and cache.nbytes == 9
    cache.put(("y", "d"), "d", 4)
    assert cache.get(("x", "b")) is None and cache.get(("x", "a")) == "a" and cache.nbytes == 10
    cache.put(("y", "d"), "D", 2)
    assert cache.get(("y", "d")) == "D" and cache.nbytes == 8, "a value that is replaced counts once"
    cache.drop("x")
    assert (cache.nbytes, len(cache)) == (2, 1)


def test_byte_cache_keeps_the_newest_value_however_large():
    cache: ByteCache[str] = ByteCache(10)
    cache.put("small", "s", 1)
    cache.put("large", "l", 100)
    assert cache.get("large") == "l" and cache.get("small") is None and cache.nbytes == 100
