package main

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBackupInDataDir: the backup would lie in the data directory.
	codeBackupInDataDir fault.Code = "backup_in_data_dir"
	// codeCatalogKeyNotMoved: the new catalog key must be moved by hand.
	codeCatalogKeyNotMoved fault.Code = "catalog_key_not_moved"
	// codeClockOrAuthority: the hub's authority has expired, or the clock is wrong.
	codeClockOrAuthority fault.Code = "clock_or_authority"
	// codeDataDirMissing: the data directory does not exist.
	codeDataDirMissing fault.Code = "data_dir_missing"
	// codeDataDirUnwritable: the hub's user cannot write the data directory.
	codeDataDirUnwritable fault.Code = "data_dir_unwritable"
	// codeDatabaseURLEmpty: the file of the database URL is empty.
	codeDatabaseURLEmpty fault.Code = "database_url_empty"
	// codeDatabaseURLUnreadable: the file of the database URL cannot be read.
	codeDatabaseURLUnreadable fault.Code = "database_url_unreadable"
	// codeListenFailed: the hub cannot listen on an address.
	codeListenFailed fault.Code = "listen_failed"
	// codeLogFlagsInvalid: a flag of the log has no valid value.
	codeLogFlagsInvalid fault.Code = "log_flags_invalid"
	// codePassphraseFileUnreadable: the passphrase file cannot be read.
	codePassphraseFileUnreadable fault.Code = "passphrase_file_unreadable"
	// codePassphraseMissing: no passphrase was given.
	codePassphraseMissing fault.Code = "passphrase_missing"
	// codePassphrasesDiffer: the repeated passphrase differs.
	codePassphrasesDiffer fault.Code = "passphrases_differ"
	// codePublisherKeyUnreadable: the file of a publisher's public key cannot be read.
	codePublisherKeyUnreadable fault.Code = "publisher_key_unreadable"
	// codeRootKeyNotMoved: the new root key must be moved by hand.
	codeRootKeyNotMoved fault.Code = "root_key_not_moved"
	// codeTLSNameNotPermitted: the hub's authority may not sign for this name.
	codeTLSNameNotPermitted fault.Code = "tls_name_not_permitted"
	// codeTokenFileUnwritable: the file of the admin token cannot be written.
	codeTokenFileUnwritable fault.Code = "token_file_unwritable"
)
