package managed

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeDatabaseBinariesMissing: PostgreSQL is not installed and no database URL was given.
	codeDatabaseBinariesMissing fault.Code = "database_binaries_missing"
	// codeDatabaseDirectory: the directory of the private database cannot be used.
	codeDatabaseDirectory fault.Code = "database_directory"
	// codeDatabaseDirectoryClosed: the database's user may not pass through a parent directory.
	codeDatabaseDirectoryClosed fault.Code = "database_directory_closed"
	// codeDatabaseEngine: another engine made the data in the directory.
	codeDatabaseEngine fault.Code = "database_engine"
	// codeDatabaseInUse: another process runs the private database.
	codeDatabaseInUse fault.Code = "database_in_use"
	// codeDatabaseInitFailed: PostgreSQL could not make its database.
	codeDatabaseInitFailed fault.Code = "database_init_failed"
	// CodeDatabaseNotReady: the private database does not run yet.
	CodeDatabaseNotReady fault.Code = "database_not_ready"
	// codeDatabasePathTooLong: the path of the database's socket exceeds the limit of Unix sockets.
	codeDatabasePathTooLong fault.Code = "database_path_too_long"
	// codeDatabaseStartFailed: PostgreSQL cannot be started.
	codeDatabaseStartFailed fault.Code = "database_start_failed"
	// codeDatabaseUser: the private database cannot run as the wanted user.
	codeDatabaseUser fault.Code = "database_user"
)
