package backup

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBackupDamaged: the file is not a complete backup of a hub.
	codeBackupDamaged fault.Code = "backup_damaged"
	// codeBackupExists: a backup of this name exists already.
	codeBackupExists fault.Code = "backup_exists"
	// codeBackupNotVerified: the backup that was just written cannot be read back.
	codeBackupNotVerified fault.Code = "backup_not_verified"
	// codeBackupNotWritten: the backup could not be written.
	codeBackupNotWritten fault.Code = "backup_not_written"
	// codeBackupUnreadable: the backup cannot be read.
	codeBackupUnreadable fault.Code = "backup_unreadable"
	// codeDataDirNotEmpty: a backup is restored into an empty or absent data directory only.
	codeDataDirNotEmpty fault.Code = "data_dir_not_empty"
	// codeKeysChanging: the hub's keys are being changed; back up afterwards.
	codeKeysChanging fault.Code = "keys_changing"
	// codeRestoreFailed: the backup could not be restored.
	codeRestoreFailed fault.Code = "restore_failed"
)
