"""The commands `hilt data ...`: logs and datasets inspected, converted, repaired, merged and edited."""
