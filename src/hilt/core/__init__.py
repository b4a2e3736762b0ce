"""The ground floor: errors, nested arrays, steps, config and atomic files. Imports nothing else of Hilt."""
