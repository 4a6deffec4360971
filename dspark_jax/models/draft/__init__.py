"""The DSpark draft: parallel backbone, Markov head, confidence head."""
