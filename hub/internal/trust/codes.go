package trust

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAlreadyInitialised: keys exist already; init never overwrites them.
	codeAlreadyInitialised fault.Code = "already_initialised"
	// codeBundleLifetimeInvalid: the lifetime of a trust bundle is too short.
	codeBundleLifetimeInvalid fault.Code = "bundle_lifetime_invalid"
	// codeBundleNotWritten: the new trust bundle could not be written.
	codeBundleNotWritten fault.Code = "bundle_not_written"
	// codeCANotWritten: the file of the authorities could not be replaced.
	codeCANotWritten fault.Code = "ca_not_written"
	// codeCatalogKeyFileMissing: the file of the new catalog key must be named.
	codeCatalogKeyFileMissing fault.Code = "catalog_key_file_missing"
	// codeCatalogKeyNotWritten: the new catalog key could not be written.
	codeCatalogKeyNotWritten fault.Code = "catalog_key_not_written"
	// codeCSRInvalid: the certificate request is not valid.
	codeCSRInvalid fault.Code = "csr_invalid"
	// codeDataDirUnreadable: the data directory cannot be searched.
	codeDataDirUnreadable fault.Code = "data_dir_unreadable"
	// codeDirectoryUnwritable: a directory for keys cannot be made.
	codeDirectoryUnwritable fault.Code = "directory_unwritable"
	// codeKeyFileDamaged: the key file is damaged or of another program.
	codeKeyFileDamaged fault.Code = "key_file_damaged"
	// codeKeyFileExists: the key file exists already.
	codeKeyFileExists fault.Code = "key_file_exists"
	// codeKeyFileUnreadable: the key file cannot be read.
	codeKeyFileUnreadable fault.Code = "key_file_unreadable"
	// codeKeyFileWrong: the key file holds the key of another role.
	codeKeyFileWrong fault.Code = "key_file_wrong"
	// codeKeyIDInvalid: the key id is malformed or unknown.
	codeKeyIDInvalid fault.Code = "key_id_invalid"
	// codeKeyRevokedAlready: the key was revoked already.
	codeKeyRevokedAlready fault.Code = "key_revoked_already"
	// codeKeysNotWritten: the keys could not be written.
	codeKeysNotWritten fault.Code = "keys_not_written"
	// codeKeysUnreadable: the hub's keys cannot be read.
	codeKeysUnreadable fault.Code = "keys_unreadable"
	// codeMinVersionInvalid: a minimum version needs an app's slug and a version.
	codeMinVersionInvalid fault.Code = "min_version_invalid"
	// codeNotInitialised: the hub has no keys yet.
	codeNotInitialised fault.Code = "not_initialised"
	// codeOfflineDirInside: the root and catalog keys must lie outside the data directory.
	codeOfflineDirInside fault.Code = "offline_dir_inside"
	// codeOfflineDirUnusable: the directory for the offline keys cannot be used.
	codeOfflineDirUnusable fault.Code = "offline_dir_unusable"
	// codePassphraseEmpty: the passphrase is empty.
	codePassphraseEmpty fault.Code = "passphrase_empty"
	// codePassphraseShort: the passphrase is too short.
	codePassphraseShort fault.Code = "passphrase_short"
	// codePassphraseWrong: the passphrase does not open the file.
	codePassphraseWrong fault.Code = "passphrase_wrong"
	// codePassphrasesMismatched: the number of passphrases does not fit the root keys.
	codePassphrasesMismatched fault.Code = "passphrases_mismatched"
	// codePrefixInvalid: a repository prefix lies outside the org's.
	codePrefixInvalid fault.Code = "prefix_invalid"
	// codePrefixMissing: at least one repository prefix must be named.
	codePrefixMissing fault.Code = "prefix_missing"
	// codePublisherKeyInvalid: the publisher's public key is not an Ed25519 key in PEM.
	codePublisherKeyInvalid fault.Code = "publisher_key_invalid"
	// codeRevokedKeyKept: the file of the revoked key could not be removed.
	codeRevokedKeyKept fault.Code = "revoked_key_kept"
	// codeRootKeyInDataDir: a root or catalog key lies in the data directory.
	codeRootKeyInDataDir fault.Code = "root_key_in_data_dir"
	// codeRootKeyIrrevocable: a root key is rotated, not revoked.
	codeRootKeyIrrevocable fault.Code = "root_key_irrevocable"
	// codeRootKeyNotWritten: the new root key could not be written.
	codeRootKeyNotWritten fault.Code = "root_key_not_written"
	// codeRootKeyWrong: too few of the given root keys may sign the trust bundle.
	codeRootKeyWrong fault.Code = "root_key_wrong"
	// codeRootRoleInvalid: the root role has an impossible number of keys or signatures.
	codeRootRoleInvalid fault.Code = "root_role_invalid"
	// codeTLSNameInvalid: a TLS name is neither a host name nor an address.
	codeTLSNameInvalid fault.Code = "tls_name_invalid"
	// codeTrustDomainInvalid: the trust domain is not a lower-case DNS name with a dot.
	codeTrustDomainInvalid fault.Code = "trust_domain_invalid"
)
