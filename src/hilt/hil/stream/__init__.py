"""What a learner makes of the stream of steps: figures of episodes that ended, and labels of good and bad steps."""
