"""The commands `hilt demo ...`: each runs a whole job and shows what came of it."""
