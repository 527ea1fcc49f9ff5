package trust

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	pemPrivateKey = "PRIVATE KEY"
	// pemOfflineKey is what an offline key file holds once decrypted: a PKCS #8 key and the role it is for.
	pemOfflineKey = "GPUAAS OFFLINE KEY"
	headerRole    = "Role"
	// sealedPrefix starts every age file that a passphrase opens (age-encryption.org/v1, scrypt recipient).
	sealedPrefix = "age-encryption.org/v1\n-> scrypt "
	// maxKeyFileBytes is far above the size of a key file; a longer file is none.
	maxKeyFileBytes = 64 << 10
)

// newKey makes a key. crypto/rand never fails.
func newKey() ed25519.PrivateKey {
	seed := make([]byte, ed25519.SeedSize)
	_, _ = rand.Read(seed)
	defer clear(seed)
	return ed25519.NewKeyFromSeed(seed)
}

func writeKey(path string, key crypto.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return durable.CreateOwned(path, pem.EncodeToMemory(&pem.Block{Type: pemPrivateKey, Bytes: der}), 0o600)
}

func readSigner(path string) (crypto.Signer, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s is readable by others (%v): chmod 600 it, and replace the key if it may have been read",
			path, info.Mode().Perm())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != pemPrivateKey {
		return nil, fmt.Errorf("%s is not a PKCS #8 key in PEM", path)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s cannot sign", path)
	}
	return signer, nil
}

func readEd25519(path string) (ed25519.PrivateKey, error) {
	signer, err := readSigner(path)
	if err != nil {
		return nil, err
	}
	key, ok := signer.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is not an Ed25519 key", path)
	}
	return key, nil
}

// writeOffline encrypts a key with the passphrase, to a file that the age tool can read.
func writeOffline(path, role string, key ed25519.PrivateKey, passphrase string, workFactor int) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	var sealed bytes.Buffer
	w, err := Encrypt(&sealed, passphrase, workFactor)
	if err != nil {
		return err
	}
	if err := pem.Encode(w, &pem.Block{
		Type: pemOfflineKey, Headers: map[string]string{headerRole: role},
		Bytes: der,
	}); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return durable.Create(path, sealed.Bytes(), 0o600)
}

// readOffline decrypts a root or catalog key.
func readOffline(path, role, passphrase string) (ed25519.PrivateKey, error) {
	damaged := func(cause error) error {
		return fault.New(fault.Malformed, codeKeyFileDamaged, path+" is not a key file that `gpuaas-hub init` wrote, or it "+
			"is damaged: take another copy.", cause)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fault.New(fault.Malformed, codeKeyFileUnreadable, "The key file "+path+" cannot be read.", err)
	}
	r, err := Decrypt(bytes.NewReader(data), path, passphrase, damaged)
	if err != nil {
		return nil, err
	}
	plain, err := io.ReadAll(io.LimitReader(r, maxKeyFileBytes))
	if err != nil {
		return nil, damaged(err)
	}
	defer clear(plain)
	block, _ := pem.Decode(plain)
	if block == nil || block.Type != pemOfflineKey {
		return nil, damaged(nil)
	}
	if block.Headers[headerRole] != role {
		return nil, fault.New(fault.Malformed, codeKeyFileWrong, path+" is not the "+role+" key.", nil)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	key, ok := parsed.(ed25519.PrivateKey)
	if err != nil || !ok {
		return nil, damaged(err)
	}
	return key, nil
}

// isOffline reports whether data is an offline key: as written, in age's armour, or decrypted.
func isOffline(data []byte) bool {
	// 30 bytes of the prefix are 40 characters of base64, whatever comes next.
	return bytes.HasPrefix(data, []byte(sealedPrefix)) ||
		bytes.Contains(data, []byte(base64.StdEncoding.EncodeToString([]byte(sealedPrefix[:30])))) ||
		bytes.Contains(data, []byte("-----BEGIN "+pemOfflineKey+"-----"))
}

// findOffline returns the path of an offline key below dir. It skips the directories of the database and the registry,
// which hold hundreds of thousands of files, none of them from an operator.
func findOffline(dir string) (string, error) {
	found := ""
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			// The database's directory belongs to another user.
			if entry != nil && entry.IsDir() && errors.Is(err, fs.ErrPermission) && path != dir {
				return fs.SkipDir
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if entry.IsDir() && path != dir && (entry.Name() == "postgres" || entry.Name() == "registry") {
			return fs.SkipDir
		}
		// Stat follows a symbolic link to a key: it is as readable for a thief as a copy.
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || info.Size() > maxKeyFileBytes {
			return nil //nolint:nilerr // gone since, or a dangling link
		}
		data, err := os.ReadFile(path) //nolint:gosec // G122: only read, and links are to be followed
		if err != nil {
			return nil //nolint:nilerr // not ours to read, so not ours to lose
		}
		if isOffline(data) {
			found = path
			return fs.SkipAll
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return found, err
}

// inside reports whether path lies in dir, symbolic links resolved as far as they exist.
func inside(path, dir string) (bool, error) {
	p, pathErr := resolve(path)
	d, dirErr := resolve(dir)
	if err := errors.Join(pathErr, dirErr); err != nil {
		return false, err
	}
	rel, err := filepath.Rel(d, p)
	return err == nil && filepath.IsLocal(rel), err
}

func resolve(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for rest := ""; ; {
		real, err := filepath.EvalSymlinks(abs)
		if err == nil {
			return filepath.Join(real, rest), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || abs == filepath.Dir(abs) {
			return "", err
		}
		rest = filepath.Join(filepath.Base(abs), rest)
		abs = filepath.Dir(abs)
	}
}
