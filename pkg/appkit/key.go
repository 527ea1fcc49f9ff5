package appkit

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxKeyFileBytes bounds a key file that is read; a larger one is none.
const maxKeyFileBytes = 64 << 10

// GenerateKey makes a publisher's key pair: the private half as PKCS #8 PEM (mode 0600), the public half as PKIX PEM.
// It never overwrites a file.
func GenerateKey(keyPath, publicPath string) (protocol.Signer, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode the key: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return nil, fmt.Errorf("encode the public key: %w", err)
	}
	if err := writeNew(keyPath, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600); err != nil {
		return nil, err
	}
	if err := writeNew(publicPath, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644); err != nil {
		_ = os.Remove(keyPath) // nobody has its public half; the next call would refuse its path
		return nil, err
	}
	return protocol.NewEd25519Signer(key), nil
}

func writeNew(path string, data []byte, mode fs.FileMode) error {
	err := durable.Create(path, data, mode)
	if errors.Is(err, fs.ErrExist) {
		return fault.New(fault.Conflict, codeKeyExists, "There is a key file already; choose another path: "+path,
			err).Permanent()
	}
	if err != nil {
		return fmt.Errorf("write a key file: %w", err)
	}
	return nil
}

// LoadKey reads a publisher's private key. A file that others may read is refused: the key counts as known to them.
func LoadKey(path string) (protocol.Signer, error) {
	unreadable := func(cause error) error {
		return fault.New(fault.Unprocessable, codeKeyUnreadable, "The key file is no Ed25519 key in PKCS #8 PEM: "+path,
			cause).Permanent()
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fault.New(fault.Unprocessable, codeKeyUnreadable, "The key file cannot be read: "+path, err).Permanent()
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fault.New(fault.Unprocessable, codeKeyExposed, "Other users may read the key file; run: chmod 600 "+path,
			nil).Permanent()
	}
	if info.Size() > maxKeyFileBytes {
		return nil, unreadable(errors.New("too large"))
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, unreadable(err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, unreadable(errors.New("no PEM block"))
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, unreadable(err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, unreadable(errors.New("another kind of key"))
	}
	return protocol.NewEd25519Signer(key), nil
}
