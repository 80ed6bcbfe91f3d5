"""How work is arranged: the engine's input and the means to build it."""
