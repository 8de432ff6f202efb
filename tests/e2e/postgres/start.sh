#!/bin/sh
# Create the database in /data at the first start, then serve it.
set -eu
if [ ! -f /data/db/PG_VERSION ]; then
    printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
    initdb --pgdata=/data/db --username=prefect --pwfile=/tmp/password \
        --auth-local=trust --auth-host=scram-sha-256 --no-sync
    rm /tmp/password
    echo 'host all all all scram-sha-256' >>/data/db/pg_hba.conf
    postgres --single -D /data/db -k /tmp postgres <<'SQL'
CREATE DATABASE prefect;
SQL
fi
exec postgres -D /data/db -k /tmp -c 'listen_addresses=*'
