"""Per-step agents: image encoders, actor and critics, and the agent that a learner trains and an actor carries."""
