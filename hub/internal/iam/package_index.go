package iam

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxIndexBytes bounds a package index with credentials and certificates: it is sealed like a secret parameter.
const maxIndexBytes = 8 << 10

// PackageIndex is where the environments of a project get their packages from, without its password.
type PackageIndex struct {
	URL, Username string
	// OwnCA says that certificates of the project verify it.
	OwnCA           bool
	ResourceVersion int64
	UpdatedAt       time.Time
}

// SecretPackageIndex returns an index as it is sealed: the URL with the credentials in it, and on the lines after it
// the certificates that it is trusted by, where the project has its own.
func SecretPackageIndex(address, username, password, caPEM string) (string, error) {
	refused := func(field, reason string) error {
		return fault.New(fault.Unprocessable, fault.CodeInvalid, "The package index cannot be used.", nil).
			WithField(field, reason).Permanent()
	}
	parsed, err := url.Parse(address)
	switch {
	case err != nil || parsed.Host == "" || parsed.Scheme != "https" && parsed.Scheme != "http":
		return "", refused("/url", "must be an http or https URL")
	case parsed.User != nil:
		return "", refused("/url", "must not hold credentials; name them as username and password")
	case parsed.RawQuery != "" || parsed.Fragment != "":
		return "", refused("/url", "must have neither query nor fragment")
	case strings.ContainsFunc(address, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", refused("/url", "must be printable ASCII")
	case username == "" && password != "":
		return "", refused("/username", "belongs to a password")
	case (username != "" || caPEM != "") && parsed.Scheme != "https":
		return "", refused("/url", "must be https where there are credentials or certificates")
	case caPEM != "" && !areCertificates([]byte(caPEM)):
		return "", refused("/ca_pem", "must be certificates in PEM, and nothing else")
	}
	if username != "" {
		parsed.User = url.UserPassword(username, password)
	}
	full := parsed.String()
	if caPEM != "" {
		full += "\n" + caPEM
	}
	if len(full) <= maxIndexBytes {
		return full, nil
	}
	return "", refused("/url", "is too long with its credentials and certificates")
}

// areCertificates reports whether a text holds certificates alone.
func areCertificates(text []byte) bool {
	for {
		block, rest := pem.Decode(text)
		if block == nil || block.Type != "CERTIFICATE" {
			return false
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return false
		}
		if text = bytes.TrimSpace(rest); len(text) == 0 {
			return true
		}
	}
}

// PutPackageIndex sets the index of a project; sealed is its SecretPackageIndex. An empty URL removes it.
func PutPackageIndex(ctx context.Context, tx db.Tx, projectID string, i PackageIndex, sealed []byte) (PackageIndex,
	error,
) {
	err := tx.QueryRow(ctx, `INSERT INTO package_indexes (project_id, url, username, sealed_url, updated_at, own_ca)
		VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (project_id) DO UPDATE SET url = excluded.url,
			username = excluded.username, own_ca = excluded.own_ca, sealed_url = excluded.sealed_url,
			updated_at = excluded.updated_at,
			resource_version = package_indexes.resource_version + 1
		RETURNING resource_version`, projectID, i.URL, i.Username, sealed, i.UpdatedAt, i.OwnCA).Scan(&i.ResourceVersion)
	return i, err
}

// GetPackageIndex reads the index of a project, with its sealed URL.
func GetPackageIndex(ctx context.Context, tx db.Tx, projectID string) (i PackageIndex, sealed []byte, err error) {
	_, err = db.SelectOne(ctx, tx, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&i.URL, &i.Username, &i.OwnCA, &sealed, &i.ResourceVersion, &i.UpdatedAt)
	}, `SELECT url, username, own_ca, sealed_url, resource_version, updated_at FROM package_indexes
		WHERE project_id = $1 AND url <> ''`, projectID)
	return i, sealed, absent(err)
}
