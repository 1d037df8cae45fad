"""Pages for operators: status, metrics of all routers, dashboard."""
