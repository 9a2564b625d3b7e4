"""The endpoints, each module with those of one kind of thing."""

from api.routes import devices, edge_leaderboard, gates, jobs, leaderboard, operations, pilots, results

ROUTERS = (
    leaderboard.router,
    jobs.router,
    results.router,
    edge_leaderboard.router,
    devices.router,
    operations.administration,
    gates.router,
    operations.machines,
    pilots.router,
    jobs.schemas,
    operations.health,
)
