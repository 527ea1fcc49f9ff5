package fault

// Codes that more than one package gives.
const (
	// CodeClockWrong: the machine's clock contradicts the signed trust bundle.
	CodeClockWrong Code = "clock_wrong"
	// CodeCredentialInvalid: the Authorization header holds no usable credential.
	CodeCredentialInvalid Code = "credential_invalid"
	// CodeCursorInvalid: the cursor was not given by this listing.
	CodeCursorInvalid Code = "cursor_invalid"
	// CodeDataDirInUse: another process of the same program uses the data directory.
	CodeDataDirInUse Code = "data_dir_in_use"
	// CodeDataDirUnusable: the data directory cannot be used.
	CodeDataDirUnusable Code = "data_dir_unusable"
	// CodeDirectoryUnusable: a directory of the program cannot be made or written.
	CodeDirectoryUnusable Code = "directory_unusable"
	// CodeDiskFull: a file system has no free space.
	CodeDiskFull Code = "disk_full"
	// CodeFlagInvalid: the value of a flag is not valid.
	CodeFlagInvalid Code = "flag_invalid"
	// CodeInternal: a defect or a broken dependency; the correlation id finds the cause in the log.
	CodeInternal Code = "internal"
	// CodeInvalid: the request is well-formed, but its values are not acceptable; errors[] names them.
	CodeInvalid Code = "invalid"
	// CodeNotFound: the resource does not exist, or belongs to another org or project.
	CodeNotFound Code = "not_found"
	// CodeQuotaExceeded: the request would exceed a quota of the org.
	CodeQuotaExceeded Code = "quota_exceeded"
	// CodeRateLimited: a budget of requests is used up.
	CodeRateLimited Code = "rate_limited"
	// CodeReferenceUnknown: the request names a resource that does not exist.
	CodeReferenceUnknown Code = "reference_unknown"
	// CodeRepositoryMalformed: the name of an image repository is not valid.
	CodeRepositoryMalformed Code = "repository_malformed"
)

// CursorInvalid is the fault of a listing that is to go on from a cursor that it did not give.
func CursorInvalid() error {
	return New(Malformed, CodeCursorInvalid, "The cursor is not one that this listing gave.", nil).
		WithHint("query/cursor", "not a cursor of this listing", "leave it out to start at the beginning").Permanent()
}
