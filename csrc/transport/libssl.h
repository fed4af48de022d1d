#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace resilient {

// The functions of libssl and libcrypto that are used, with their types; every
// pointer to one of OpenSSL's structures is a void*.
// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are parts of types
#define RESILIENT_SSL_FUNCTIONS(X)                                           \
  X(unsigned long, OpenSSL_version_num, ())                                  \
  X(int, OPENSSL_init_crypto, (uint64_t, const void*))                       \
  X(const char*, OpenSSL_version, (int))                                     \
  X(const void*, TLS_client_method, ())                                      \
  X(const void*, TLS_server_method, ())                                      \
  X(void*, SSL_CTX_new, (const void*))                                       \
  X(void, SSL_CTX_free, (void*))                                             \
  X(long, SSL_CTX_ctrl, (void*, int, long, void*))                           \
  X(uint64_t, SSL_CTX_set_options, (void*, uint64_t))                        \
  X(uint64_t, SSL_CTX_clear_options, (void*, uint64_t))                      \
  X(int, SSL_CTX_set_ciphersuites, (void*, const char*))                     \
  X(int, SSL_CTX_set_num_tickets, (void*, size_t))                           \
  X(void, SSL_CTX_set_verify, (void*, int, void*))                           \
  X(void,                                                                    \
    SSL_CTX_set_default_passwd_cb,                                           \
    (void*, int (*)(char*, int, int, void*)))                                \
  X(int, SSL_CTX_use_certificate_chain_file, (void*, const char*))           \
  X(int, SSL_CTX_use_PrivateKey_file, (void*, const char*, int))             \
  X(int, SSL_CTX_check_private_key, (const void*))                           \
  X(int, SSL_CTX_load_verify_locations, (void*, const char*, const char*))   \
  X(void*, SSL_CTX_get0_param, (void*))                                      \
  X(void,                                                                    \
    SSL_CTX_set_psk_use_session_callback,                                    \
    (void*,                                                                  \
     int (*)(void*, const void*, const unsigned char**, size_t*, void**)))   \
  X(void,                                                                    \
    SSL_CTX_set_psk_find_session_callback,                                   \
    (void*, int (*)(void*, const unsigned char*, size_t, void**)))           \
  X(void,                                                                    \
    SSL_CTX_set_client_hello_cb,                                             \
    (void*, int (*)(void*, int*, void*), void*))                             \
  X(int,                                                                     \
    SSL_client_hello_get0_ext,                                               \
    (void*, unsigned, const unsigned char**, size_t*))                       \
  X(int, SSL_set_alpn_protos, (void*, const unsigned char*, unsigned))       \
  X(void*, SSL_new, (void*))                                                 \
  X(void, SSL_free, (void*))                                                 \
  X(int, SSL_set_ex_data, (void*, int, void*))                               \
  X(void*, SSL_get_ex_data, (const void*, int))                              \
  X(void, SSL_set_bio, (void*, void*, void*))                                \
  X(void, SSL_set_connect_state, (void*))                                    \
  X(void, SSL_set_accept_state, (void*))                                     \
  X(int, SSL_do_handshake, (void*))                                          \
  X(int, SSL_write_early_data, (void*, const void*, size_t, size_t*))        \
  X(int, SSL_read_early_data, (void*, void*, size_t, size_t*))               \
  X(int, SSL_get_early_data_status, (const void*))                           \
  X(int, SSL_set_max_early_data, (void*, uint32_t))                          \
  X(int, SSL_read_ex, (void*, void*, size_t, size_t*))                       \
  X(int, SSL_write_ex, (void*, const void*, size_t, size_t*))                \
  X(int, SSL_has_pending, (const void*))                                     \
  X(int, SSL_get_error, (const void*, int))                                  \
  X(int, SSL_shutdown, (void*))                                              \
  X(int, SSL_version, (const void*))                                         \
  X(int, SSL_session_reused, (const void*))                                  \
  X(long, SSL_get_verify_result, (const void*))                              \
  X(void*, SSL_get0_verified_chain, (const void*))                           \
  X(int, SSL_key_update, (void*, int))                                       \
  X(int,                                                                     \
    SSL_export_keying_material,                                              \
    (void*,                                                                  \
     unsigned char*,                                                         \
     size_t,                                                                 \
     const char*,                                                            \
     size_t,                                                                 \
     const unsigned char*,                                                   \
     size_t,                                                                 \
     int))                                                                   \
  X(const void*, SSL_get_current_cipher, (const void*))                      \
  X(const void*, SSL_get_pending_cipher, (const void*))                      \
  X(size_t, SSL_client_hello_get0_ciphers, (void*, const unsigned char**))   \
  X(int, SSL_set_ciphersuites, (void*, const char*))                         \
  X(const char*, SSL_CIPHER_get_name, (const void*))                         \
  X(const void*, SSL_CIPHER_find, (void*, const unsigned char*))             \
  X(void*, SSL_SESSION_new, ())                                              \
  X(void, SSL_SESSION_free, (void*))                                         \
  X(int, SSL_SESSION_set1_master_key, (void*, const unsigned char*, size_t)) \
  X(int, SSL_SESSION_set_cipher, (void*, const void*))                       \
  X(int, SSL_SESSION_set_protocol_version, (void*, int))                     \
  X(int, SSL_SESSION_set_max_early_data, (void*, uint32_t))                  \
  X(void*, BIO_meth_new, (int, const char*))                                 \
  X(int, BIO_meth_set_write, (void*, int (*)(void*, const char*, int)))      \
  X(int, BIO_meth_set_read, (void*, int (*)(void*, char*, int)))             \
  X(int, BIO_meth_set_ctrl, (void*, long (*)(void*, int, long, void*)))      \
  X(void*, BIO_new, (const void*))                                           \
  X(void, BIO_set_data, (void*, void*))                                      \
  X(void*, BIO_get_data, (void*))                                            \
  X(void, BIO_set_init, (void*, int))                                        \
  X(void, BIO_set_flags, (void*, int))                                       \
  X(void, BIO_clear_flags, (void*, int))                                     \
  X(unsigned long, ERR_get_error, ())                                        \
  X(void, ERR_clear_error, ())                                               \
  X(const char*, ERR_reason_error_string, (unsigned long))                   \
  X(int, X509_VERIFY_PARAM_set_flags, (void*, unsigned long))                \
  X(const char*, X509_verify_cert_error_string, (long))                      \
  X(int, X509_check_host, (void*, const char*, size_t, unsigned, char**))    \
  X(int, X509_check_ip_asc, (void*, const char*, unsigned))                  \
  X(void*, OPENSSL_sk_value, (const void*, int))

// OpenSSL's libssl, looked up at run time: only encrypted connections need it.
struct Libssl {
#define X(result, name, arguments) result(*name) arguments = nullptr; // NOLINT
  RESILIENT_SSL_FUNCTIONS(X)
#undef X
  std::string missing; // empty: all of it is there

  Libssl();
};
// NOLINTEND(bugprone-macro-parentheses)

// The first call loads it, for the process.
const Libssl& libssl();

// The suite that a client of this host wants most, by its number on the wire.
// All are for SHA-256.
const unsigned char* preferredSuite();

// The settings that all sessions share: TLS 1.3 alone, X25519, no tickets. Null
// if this library has them not.
void* newTlsContext(bool isClient);

} // namespace resilient
