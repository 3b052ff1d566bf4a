"""The only place that makes markup."""
