"""robosuite's control loop, in which LIBERO's arm moves: `hilt.envs.robosuite.osc_step`. See docs/libero.md."""
