"""The endpoints and pages, one file for each resource; `ROUTERS` in api/app.py lists them."""
