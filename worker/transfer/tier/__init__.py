"""KV below the pool: pages that were evicted are found again in host memory or in a directory."""
