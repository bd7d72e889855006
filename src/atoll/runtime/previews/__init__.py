"""Previews: ports of a sandbox as URLs for browsers and other clients."""
