"""Weight gradients computed later."""
