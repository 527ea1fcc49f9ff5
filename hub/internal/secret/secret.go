// Package secret seals what the hub must store and give out again (signing keys, answers that hold a secret once), so
// that the database or a backup alone opens nothing. It owns the secrets of projects, and what of them is sealed to
// nodes. It does not decide who may read a secret.
package secret

import (
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// KEK is a key-encryption key. It wraps the one-time key of each sealed value, so that it may live elsewhere than here.
type KEK interface {
	// ID names the key, 8 bytes, so that a value says which key opens it.
	ID() [8]byte
	Wrap(dataKey []byte) ([]byte, error)
	Unwrap(wrapped []byte) ([]byte, error)
}

const (
	// MaxPlaintext bounds one sealed value.
	MaxPlaintext = 1 << 20
	keySize      = chacha20poly1305.KeySize
	// format 1: version byte, KEK id, wrapped key (fixed length below), nonce, ciphertext.
	format     = 1
	wrappedLen = chacha20poly1305.NonceSizeX + keySize + chacha20poly1305.Overhead
	headLen    = 1 + 8 + wrappedLen + chacha20poly1305.NonceSizeX
)

// Sealer seals with one KEK and opens what any of its KEKs sealed.
type Sealer struct {
	current KEK
	known   map[[8]byte]KEK
}

// NewSealer seals with current; older are KEKs of before a rotation.
func NewSealer(current KEK, older ...KEK) *Sealer {
	s := &Sealer{current: current, known: map[[8]byte]KEK{current.ID(): current}}
	for _, k := range older {
		s.known[k.ID()] = k
	}
	return s
}

// Seal encrypts plaintext. aad is not secret and not kept: the same aad must be given to Open, so that a sealed value
// copied to another row opens nothing.
func (s *Sealer) Seal(plaintext, aad []byte) ([]byte, error) {
	if len(plaintext) > MaxPlaintext {
		return nil, fmt.Errorf("seal: %d bytes are over the limit of %d", len(plaintext), MaxPlaintext)
	}
	dataKey := make([]byte, keySize)
	mustRandom(dataKey)
	wrapped, err := s.current.Wrap(dataKey)
	if err != nil {
		return nil, fmt.Errorf("seal: wrap: %w", err)
	}
	if len(wrapped) != wrappedLen {
		return nil, fmt.Errorf("seal: the key wrapped to %d bytes instead of %d", len(wrapped), wrappedLen)
	}
	aead, err := chacha20poly1305.NewX(dataKey)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	id := s.current.ID()
	out := make([]byte, 0, headLen+len(plaintext)+aead.Overhead())
	out = append(out, format)
	out = append(out, id[:]...)
	out = append(out, wrapped...)
	nonce := out[len(out) : len(out)+aead.NonceSize()]
	mustRandom(nonce)
	out = out[:len(out)+len(nonce)]
	return aead.Seal(out, nonce, plaintext, aad), nil
}

// Open decrypts what Seal made with the same aad.
func (s *Sealer) Open(sealed, aad []byte) ([]byte, error) {
	if len(sealed) < headLen || sealed[0] != format {
		return nil, errors.New("open: not a sealed value of this program")
	}
	id := [8]byte(sealed[1:9])
	kek, ok := s.known[id]
	if !ok {
		return nil, fmt.Errorf("open: sealed with the unknown key %x", id)
	}
	dataKey, err := kek.Unwrap(sealed[9 : 9+wrappedLen])
	if err != nil {
		return nil, fmt.Errorf("open: unwrap: %w", err)
	}
	aead, err := chacha20poly1305.NewX(dataKey)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	plaintext, err := aead.Open(nil, sealed[9+wrappedLen:headLen], sealed[headLen:], aad)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return plaintext, nil
}

// localKEK is a KEK whose key is in this process.
type localKEK struct {
	id   [8]byte
	aead cipher.AEAD
}

// NewKEK makes a KEK of 32 random bytes.
func NewKEK(key []byte) (KEK, error) {
	aead, err := chacha20poly1305.NewX(key)
	if err != nil {
		return nil, fmt.Errorf("key-encryption key: %w", err)
	}
	sum := sha256.Sum256(append([]byte("gpuaas kek id\x00"), key...))
	return localKEK{id: [8]byte(sum[:8]), aead: aead}, nil
}

func (k localKEK) ID() [8]byte { return k.id }

func (k localKEK) Wrap(dataKey []byte) ([]byte, error) {
	nonce := make([]byte, k.aead.NonceSize(), wrappedLen)
	mustRandom(nonce)
	return k.aead.Seal(nonce, nonce, dataKey, k.id[:]), nil //nolint:gosec // the nonce was filled with random bytes above
}

func (k localKEK) Unwrap(wrapped []byte) ([]byte, error) {
	n := k.aead.NonceSize()
	if len(wrapped) < n {
		return nil, errors.New("wrapped key is cut short")
	}
	return k.aead.Open(nil, wrapped[:n], wrapped[n:], k.id[:])
}

// LoadKEK reads the key-encryption key from path; a file that does not exist is made, mode 0600, synced. A file that
// others may read is refused: together with the database it opens every secret.
func LoadKEK(path string) (KEK, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return createKEK(path)
	}
	if err != nil {
		return nil, refuse("The key file "+path+" cannot be examined.", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, refuse(fmt.Sprintf("The key file %s may be read by others (mode %04o); run: chmod 600 %s", path,
			info.Mode().Perm(), path), nil)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, refuse("The key file "+path+" cannot be read.", err)
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(raw)))
	if err != nil || len(key) != keySize {
		return nil, refuse("The key file "+path+" does not hold 32 bytes in base64; restore it from your backup: without "+
			"it the hub's sealed secrets are lost.", err)
	}
	return NewKEK(key)
}

func createKEK(path string) (KEK, error) {
	key := make([]byte, keySize)
	mustRandom(key)
	next := path + "." + rand.Text()
	err := durable.Create(next, []byte(base64.StdEncoding.EncodeToString(key)+"\n"), 0o600)
	defer func() { _ = os.Remove(next) }()
	if err == nil {
		// Link, not rename: of two hubs that start at once one loses here, and reads the winner's key.
		err = os.Link(next, path)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, refuse("The key file "+path+" cannot be written.", err)
	}
	if err := durable.SyncDir(filepath.Dir(path)); err != nil {
		return nil, refuse("The directory of "+path+" cannot be synced.", err)
	}
	return LoadKEK(path)
}

// mustRandom fills b; crypto/rand.Read never fails, it ends the program.
func mustRandom(b []byte) { _, _ = rand.Read(b) }

func refuse(public string, cause error) *fault.Error {
	return fault.New(fault.Unprocessable, codeKeyFile, public, cause).Permanent()
}
