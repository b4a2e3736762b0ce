"""One arm with a person: actors that drive, a person who takes over, and a learner that trains an agent from replay."""
