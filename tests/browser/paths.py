"""The pages, each by a name, with something to show."""

from tests.browser.stored import Stored


def paths(stored: Stored) -> dict[str, str]:
    """The address of every page without the service's."""
    return {
        "leaderboard": "/",
        "board": f"/?workload={stored.board}",
        "pareto": f"/pareto?workload={stored.board}&over=price&hardware_price=30000&kwh=0.25&watts=300",
        "result": f"/results/{stored.best}",
        "hostile": f"/results/{stored.hostile}",
        "invalid": f"/results/{stored.invalid}",
        "compare": f"/compare?result={stored.baseline}&result={stored.best}&result={stored.earlier}",
        "ladder": f"/ladder/{stored.ladder}",
        "history": f"/history?result={stored.earlier}",
        "histories": "/history",
        "claims": "/claims?verdict=implausible",
        "techniques": "/techniques?measured=true",
        "hardware": "/hardware?kind=microcontroller",
        "workers": "/workers",
        "devices": "/devices",
        "jobs": "/jobs",
        "job": f"/jobs/{stored.ladder}",
        "new_job": "/jobs/new?preset=first",
        "new_job_wrong": "/jobs/new?workload=generate&model=preset:nothing",
        "login": "/login",
        "keys": "/keys",
        "webhooks": "/webhooks",
        "alerts": f"/alerts?result={stored.best}",
        "problem": "/nothing",
    }
