"""What the public modules are made of. Nothing here is a public interface."""
