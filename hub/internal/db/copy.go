package db

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Table is one table of the schema with its columns, in the order of their names.
type Table struct {
	Name    string
	Columns []string
}

// list names the columns for a statement.
func (t Table) list() string {
	quoted := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		quoted[i] = pgx.Identifier{c}.Sanitize()
	}
	return strings.Join(quoted, ", ")
}

// The tables that are goose's, and say nothing about the hub.
const (
	versionsTable = "goose_db_version"
	lockTable     = "goose_lock"
)

// Dump is one consistent snapshot of everything, for a backup, while other transactions go on writing.
type Dump struct {
	Tx
	conn *pgx.Conn
	// Versions are the applied migrations, in their order.
	Versions []int64
	// Tables are the hub's own; one that refers to another comes after it.
	Tables []Table
}

// Copy writes the rows of a table in PostgreSQL's text form, which both engines write and read.
func (d *Dump) Copy(ctx context.Context, t Table, w io.Writer) (rows int64, err error) {
	tag, err := d.conn.PgConn().CopyTo(ctx, w, "COPY "+pgx.Identifier{t.Name}.Sanitize()+" ("+t.list()+") TO STDOUT")
	if err != nil {
		return 0, fmt.Errorf("read table %s: %w", t.Name, err)
	}
	return tag.RowsAffected(), nil
}

// WithDump runs fn over one snapshot. Nothing is locked but for TRUNCATE; the snapshot lasts as long as fn does.
func WithDump(ctx context.Context, d *DB, fn func(*Dump) error) error {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return unavailable(err)
	}
	defer conn.Release()
	level := pgx.RepeatableRead
	if d.engine == CockroachDB {
		level = pgx.Serializable
	}
	// A slow disk below the backup must not end the transaction half-way.
	if _, err := conn.Exec(ctx, `SET idle_in_transaction_session_timeout = 0`); err != nil {
		return err
	}
	defer func() { _, _ = conn.Exec(context.WithoutCancel(ctx), `RESET idle_in_transaction_session_timeout`) }()
	defer rollback(ctx, conn.Conn())
	for range maxDumpStarts {
		begun, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: level, AccessMode: pgx.ReadOnly})
		if err != nil {
			return unavailable(err)
		}
		dump := &Dump{Tx: &retryingTx{on: begun, conn: conn.Conn()}, conn: conn.Conn()}
		if err := dump.describe(ctx); err != nil {
			return err
		}
		if d.afterSnapshot != nil {
			d.afterSnapshot()
		}
		whole, err := dump.keepWhole(ctx, d.engine)
		if err != nil {
			return err
		}
		if whole {
			return fn(dump)
		}
		rollback(ctx, conn.Conn())
	}
	return busy(errors.New("tables were emptied at each start of the dump"))
}

// maxDumpStarts bounds how often a dump starts afresh because a table was emptied meanwhile, which happens every few
// hours.
const maxDumpStarts = 10

func (d *Dump) describe(ctx context.Context) (err error) {
	if d.Versions, err = appliedVersions(ctx, d); err != nil {
		return err
	}
	if d.Tables, err = tables(ctx, d); err != nil {
		return err
	}
	d.Tables, err = referredFirst(ctx, d, d.Tables)
	return err
}

// keepWhole keeps all tables from being emptied by TRUNCATE until the dump ends. On PostgreSQL a snapshot does not hold
// the rows of a table that was truncated after it: whole is false where that has happened.
func (d *Dump) keepWhole(ctx context.Context, engine Engine) (whole bool, err error) {
	if engine != PostgreSQL {
		return true, nil
	}
	for _, t := range d.Tables {
		if _, err := d.Exec(ctx, `SELECT 1 FROM `+pgx.Identifier{t.Name}.Sanitize()+` LIMIT 0`); err != nil {
			return false, err
		}
	}
	// The column is of the snapshot, the function's result of now.
	return Value[bool](ctx, d,
		`SELECT NOT EXISTS (SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = 'public' AND c.relkind = 'r' AND pg_relation_filenode(c.oid) IS DISTINCT FROM c.relfilenode)`)
}

func appliedVersions(ctx context.Context, tx Tx) ([]int64, error) {
	versions, err := Select(ctx, tx, pgx.RowTo[int64], `SELECT version_id FROM `+versionsTable+
		` WHERE is_applied AND version_id > 0 ORDER BY version_id`)
	return slices.Compact(versions), err
}

func tables(ctx context.Context, tx Tx) ([]Table, error) {
	var (
		out          []Table
		name, column string
	)
	err := ForEach(ctx, tx, []any{&name, &column}, func() {
		// CockroachDB shows the row id of a table without a primary key.
		if name == versionsTable || name == lockTable || column == "rowid" {
			return
		}
		if len(out) == 0 || out[len(out)-1].Name != name {
			out = append(out, Table{Name: name})
		}
		last := &out[len(out)-1]
		last.Columns = append(last.Columns, column)
	},
		`SELECT c.table_name, c.column_name FROM information_schema.columns c JOIN information_schema.tables t
			ON t.table_schema = c.table_schema AND t.table_name = c.table_name AND t.table_type = 'BASE TABLE'
		WHERE c.table_schema = 'public' AND c.is_generated = 'NEVER' ORDER BY c.table_name, c.column_name`)
	return out, err
}

// referredFirst orders tables so that foreign keys hold while they are filled one after the other.
func referredFirst(ctx context.Context, tx Tx, in []Table) ([]Table, error) {
	refers := map[string][]string{}
	var from, to string
	if err := ForEach(ctx, tx, []any{&from, &to}, func() {
		if from != to {
			refers[from] = append(refers[from], to)
		}
	}, `SELECT r.relname, t.relname FROM pg_catalog.pg_constraint c
		JOIN pg_catalog.pg_class r ON r.oid = c.conrelid JOIN pg_catalog.pg_class t ON t.oid = c.confrelid
		WHERE c.contype = 'f'`); err != nil {
		return nil, err
	}
	var out []Table
	placed := map[string]bool{}
	for len(out) < len(in) {
		before := len(out)
		for _, t := range in {
			if !placed[t.Name] && !slices.ContainsFunc(refers[t.Name], func(to string) bool { return !placed[to] }) {
				out, placed[t.Name] = append(out, t), true
			}
		}
		if len(out) == before {
			return nil, fmt.Errorf("the tables' foreign keys go in a circle")
		}
	}
	return out, nil
}

// RequireEmpty refuses a database that has tables, as Load does.
func RequireEmpty(ctx context.Context, d *DB) error {
	have, err := ReadTx(ctx, d, func(tx Tx) ([]Table, error) { return tables(ctx, tx) })
	if err == nil && len(have) > 0 {
		err = fault.New(fault.Conflict, codeDatabaseNotEmpty, "The database has tables already: a backup is restored into "+
			"an empty one only.", fmt.Errorf("table %s", have[0].Name))
	}
	return err
}

// Load fills an empty database from a dump: first the schema as it was then, then the rows, one table a statement.
// Migrate migrates it afterwards. next gives the rows of the tables, one after the other, until ok is false.
func Load(ctx context.Context, d *DB, versions []int64,
	next func() (t Table, rows io.Reader, ok bool, err error),
) error {
	if err := RequireEmpty(ctx, d); err != nil {
		return err
	}
	if err := migrateTo(ctx, d, versions); err != nil {
		return err
	}
	have, err := ReadTx(ctx, d, func(tx Tx) ([]Table, error) { return tables(ctx, tx) })
	if err != nil {
		return err
	}
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return unavailable(err)
	}
	defer conn.Release()
	for {
		t, rows, ok, err := next()
		if err != nil || !ok {
			return err
		}
		if err := loadTable(ctx, conn, have, t, rows); err != nil {
			return fmt.Errorf("fill table %s: %w", t.Name, err)
		}
	}
}

func loadTable(ctx context.Context, conn *pgxpool.Conn, have []Table, t Table, rows io.Reader) error {
	known := slices.ContainsFunc(have, func(h Table) bool {
		return h.Name == t.Name && !slices.ContainsFunc(t.Columns, func(c string) bool {
			return !slices.Contains(h.Columns, c)
		})
	})
	if !known {
		return fault.New(fault.Unprocessable, codeBackupOfAnotherSchema, "The backup holds the table "+t.Name+
			" in a form that this release does not know.", nil)
	}
	// Migrations write rows, too; those of the dump are all there are to be.
	if _, err := conn.Exec(ctx, "DELETE FROM "+pgx.Identifier{t.Name}.Sanitize()); err != nil {
		return err
	}
	_, err := conn.Conn().PgConn().CopyFrom(ctx, rows, "COPY "+pgx.Identifier{t.Name}.Sanitize()+" ("+t.list()+
		") FROM STDIN")
	return err
}
