"""The data of `atoll serve`: tenants, keys, quotas, audit, events and webhooks, and the engines of tenants. No HTTP."""
