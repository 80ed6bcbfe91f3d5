"""Which choice is best: asks the other rooms in turn."""
