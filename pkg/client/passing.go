package client

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
)

// isPassing tells network trouble, which may pass, from what will be the same next time: a certificate that is not
// trusted.
func isPassing(err error) bool {
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
