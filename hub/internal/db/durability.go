package db

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// raiseSynchronousCommit is a column of the statement that prepares a connection to PostgreSQL: COMMIT answers once the
// primary, and each synchronous standby, has the transaction on its disk. Weaker settings of the server, the role or
// the URL (off, local, remote_write) are raised, remote_apply is kept.
const raiseSynchronousCommit = `set_config('synchronous_commit', CASE current_setting('synchronous_commit')
	WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)`

// demands are the settings without which PostgreSQL may lose what it has confirmed, with the values that the hub takes
// and what to do about others.
func demands() []demand {
	return []demand{
		{"synchronous_commit", []string{"on", "remote_apply"}, "The hub sets it for each of its connections, and what " +
			"lies between drops that: connect to the server itself or through a pooler in session mode, or set it for the " +
			"hub's role with ALTER ROLE … SET synchronous_commit = on."},
		{"fsync", []string{"on"}, "Set it to on in postgresql.conf and reload the server; the hub cannot set it."},
		{"full_page_writes", []string{"on"}, "Set it to on in postgresql.conf and reload the server; the hub cannot set it."},
	}
}

type demand struct {
	setting string
	values  []string
	remedy  string
}

// requireDurable refuses a PostgreSQL that answers COMMIT before the transaction can survive a crash or a power cut.
func requireDurable(ctx context.Context, pool *pgxpool.Pool) error {
	for _, d := range demands() {
		var value string
		if err := pool.QueryRow(ctx, `SELECT current_setting($1)`, d.setting).Scan(&value); err != nil {
			return unavailable(err)
		}
		if !slices.Contains(d.values, value) {
			return fault.New(fault.Unprocessable, codeDatabaseNotDurable, fmt.Sprintf("PostgreSQL's setting %s is %s: a "+
				"crash could lose changes that the hub has confirmed. %s", d.setting, value, d.remedy), nil)
		}
	}
	return nil
}

// preferPrimary has a URL with several hosts, of which one is the primary and the others follow it, reach the one that
// takes writes. A URL whose target_session_attrs demands more than a connection keeps it.
func preferPrimary(conf *pgx.ConnConfig) {
	if conf.ValidateConnect != nil {
		return
	}
	for _, other := range conf.Fallbacks {
		if other.Host != conf.Host || other.Port != conf.Port {
			conf.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
			return
		}
	}
}
