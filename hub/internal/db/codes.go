package db

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBackupOfAnotherSchema: the backup holds a table in an unknown form.
	codeBackupOfAnotherSchema fault.Code = "backup_of_another_schema"
	// CodeBackupOfNewerRelease: a newer release made the backup.
	CodeBackupOfNewerRelease fault.Code = "backup_of_newer_release"
	// CodeCancelled: the request ended before the change was made.
	CodeCancelled fault.Code = "cancelled"
	// codeCommitAmbiguous: the connection broke during a commit; repeat the request with its idempotency key.
	codeCommitAmbiguous fault.Code = "commit_ambiguous"
	// CodeDatabaseBusy: transactions at the same place conflict; try again.
	CodeDatabaseBusy fault.Code = "database_busy"
	// codeDatabaseDiskFull: the database has no disk space left; nothing was changed.
	codeDatabaseDiskFull fault.Code = "database_disk_full"
	// codeDatabaseNotEmpty: a backup is restored into an empty database only.
	codeDatabaseNotEmpty fault.Code = "database_not_empty"
	// codeDatabaseNotDurable: PostgreSQL may lose confirmed changes in a crash.
	codeDatabaseNotDurable fault.Code = "database_not_durable"
	// CodeDatabaseUnavailable: the database does not answer.
	CodeDatabaseUnavailable fault.Code = "database_unavailable"
	// codeDatabaseUnsupported: the database is neither CockroachDB nor PostgreSQL.
	codeDatabaseUnsupported fault.Code = "database_unsupported"
	// codeDatabaseURLInvalid: the database URL cannot be read.
	codeDatabaseURLInvalid fault.Code = "database_url_invalid"
	// CodeLeaseHeld: another hub process works on the database.
	CodeLeaseHeld fault.Code = "hub_already_running"
)
