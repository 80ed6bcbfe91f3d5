"""The ring_exchange strategy."""
