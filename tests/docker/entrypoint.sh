#!/bin/sh
# What the official images of PostgreSQL, Redis and Prometheus do before their servers start, as far as our compose files
# rely on it: https://hub.docker.com/_/postgres, https://hub.docker.com/_/redis, https://hub.docker.com/r/prom/prometheus
set -e

as_postgres() {
    mkdir -p /var/run/postgresql
    chown -R postgres:postgres "$PGDATA" /var/run/postgresql
    exec setpriv --reuid postgres --regid postgres --init-groups "$0" "$@"
}

make_database() {
    printf %s "$POSTGRES_PASSWORD" > /tmp/password
    # The arguments are words: unquoted.
    initdb --username="$POSTGRES_USER" --pwfile=/tmp/password $POSTGRES_INITDB_ARGS
    rm /tmp/password
    echo "listen_addresses = '*'" >> "$PGDATA/postgresql.conf"
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl start --wait --options="-c listen_addresses=''"
    [ "$POSTGRES_DB" = postgres ] || createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl stop --wait --mode=fast
}

case "$1" in
postgres)
    export PGDATA=/var/lib/postgresql/data
    mkdir -p "$PGDATA"
    [ "$(id -u)" != 0 ] || as_postgres "$@"
    [ -s "$PGDATA/PG_VERSION" ] || make_database
    exec "$@"
    ;;
redis-server) exec "$@" --protected-mode no ;;
--*) exec prometheus "$@" ;;
*) exec "$@" ;;
esac
