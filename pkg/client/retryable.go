package client

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
)

// isRetryable reports whether a failed request may succeed later: a network failure may, a certificate that is not
// trusted will not.
func isRetryable(err error) bool {
	var (
		authority x509.UnknownAuthorityError
		hostname  x509.HostnameError
		invalid   x509.CertificateInvalidError
		verify    *tls.CertificateVerificationError
		record    tls.RecordHeaderError
	)
	return !errors.As(err, &authority) && !errors.As(err, &hostname) && !errors.As(err, &invalid) &&
		!errors.As(err, &verify) && !errors.As(err, &record)
}
