# PostgreSQL, Redis and Prometheus of Debian, under the names of the official images that the compose files start.
FROM optigpu-tests/servers
COPY entrypoint.sh /
ENV LANG=C.UTF-8 PATH=/usr/lib/postgresql/17/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/entrypoint.sh"]
