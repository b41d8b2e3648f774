"""Put batchguard in front of a batch and it never runs twice: one PostgreSQL advisory lock, kept honest."""

__version__ = "0.1.0"
