"""The async_tp strategy."""
